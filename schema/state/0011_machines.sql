-- Bytes of a checkpoint's virtual machine: memory, state and disk; 0: it is of kind checkpoint.
ALTER TABLE checkpoints ADD COLUMN machine_bytes INTEGER NOT NULL DEFAULT 0 CHECK (machine_bytes >= 0);
