-- Checkpoints of this kernel. A row is what makes one visible: everything that its manifest names is in the store before.
CREATE TABLE checkpoints (
    number         INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice, also after retention removed the newest
    id             BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
    name           TEXT NOT NULL,
    description    TEXT NOT NULL,
    type           INTEGER NOT NULL CHECK (type BETWEEN 0 AND 3), -- the place in CheckpointType::ALL
    creator        TEXT NOT NULL,
    at_ms          INTEGER NOT NULL,
    parent         BLOB CHECK (length(parent) = 16),
    pinned         INTEGER NOT NULL,
    restore_point  INTEGER NOT NULL,
    restored_at_ms INTEGER,
    journal        INTEGER NOT NULL,                  -- its own entry in the journal
    manifest       BLOB NOT NULL CHECK (length(manifest) = 32),
    files          INTEGER NOT NULL,
    state_bytes    INTEGER NOT NULL
) STRICT;

-- Where the kernel is: the parent of its next checkpoint, and what undo goes back to.
CREATE TABLE head (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    checkpoint BLOB CHECK (length(checkpoint) = 16),
    undo       BLOB CHECK (length(undo) = 16)
) STRICT;

-- A restore that has begun to change things: the daemon that finds it finishes or reverts it.
CREATE TABLE restoring (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    target BLOB NOT NULL CHECK (length(target) = 16), -- the checkpoint to be at
    safety BLOB NOT NULL CHECK (length(safety) = 16), -- taken just before
    actor  TEXT NOT NULL,
    at_ms  INTEGER NOT NULL
) STRICT;
