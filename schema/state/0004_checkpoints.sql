-- Checkpoints of this kernel. The row makes a checkpoint visible; all objects of its manifest are in the store before.
CREATE TABLE checkpoints (
    number         INTEGER PRIMARY KEY AUTOINCREMENT, -- never reused, even if retention removed the newest
    id             BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
    name           TEXT NOT NULL,
    description    TEXT NOT NULL,
    type           INTEGER NOT NULL CHECK (type BETWEEN 0 AND 3), -- the index in CheckpointType::ALL
    creator        TEXT NOT NULL,
    at_ms          INTEGER NOT NULL,
    parent         BLOB CHECK (length(parent) = 16),
    pinned         INTEGER NOT NULL,
    restore_point  INTEGER NOT NULL,
    restored_at_ms INTEGER,
    journal        INTEGER NOT NULL,                  -- sequence of its journal entry
    manifest       BLOB NOT NULL CHECK (length(manifest) = 32),
    files          INTEGER NOT NULL,
    state_bytes    INTEGER NOT NULL
) STRICT;

-- The kernel's position: the parent of the next checkpoint, and the target of undo.
CREATE TABLE head (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    checkpoint BLOB CHECK (length(checkpoint) = 16),
    undo       BLOB CHECK (length(undo) = 16)
) STRICT;

<<<<<<< HEAD
-- A restore that has begun to change things: whoever finds it must end it, forwards or backwards.
CREATE TABLE restoring (
=======
-- The running or interrupted transition. Recovery finishes or reverts it before code runs.
CREATE TABLE transition (
>>>>>>> 3c7c0fe (Reword the comments of the database schemas)
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    target BLOB NOT NULL CHECK (length(target) = 16), -- the checkpoint to be at
    safety BLOB NOT NULL CHECK (length(safety) = 16), -- taken just before
    actor  TEXT NOT NULL,
    at_ms  INTEGER NOT NULL
) STRICT;
