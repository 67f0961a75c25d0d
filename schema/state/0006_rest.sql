-- The newest journal entry when the head was set; the head does not include later entries.
ALTER TABLE head ADD COLUMN journal INTEGER NOT NULL DEFAULT 0;
