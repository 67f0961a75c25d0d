-- The work that goes on in a kernel: steps, who works, decisions, artifacts; and messages that checkpoints compacted.

-- Go back with a restore; the journal keeps what was.
CREATE TABLE steps (
    number          INTEGER PRIMARY KEY,               -- from 1, no gaps
    name            TEXT NOT NULL,
    agent           TEXT NOT NULL,                     -- who worked when it was begun
    begun_at_ms     INTEGER NOT NULL,
    completed_at_ms INTEGER                            -- NULL: the current step
) STRICT;

CREATE TABLE agent (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    name TEXT NOT NULL
) STRICT;

CREATE TABLE decisions (
    id               INTEGER PRIMARY KEY,
    title            TEXT NOT NULL,
    text             TEXT NOT NULL,
    state            INTEGER NOT NULL CHECK (state BETWEEN 0 AND 2), -- the place in DecisionState::ALL
    agent            TEXT NOT NULL,
    step             INTEGER NOT NULL,
    opened_by        TEXT NOT NULL,
    opened_at_ms     INTEGER NOT NULL,
    locked_by        TEXT,
    locked_at_ms     INTEGER,
    superseded_by    TEXT,
    superseded_at_ms INTEGER,
    restored         BLOB CHECK (length(restored) = 16) -- the checkpoint before the restore that last changed it
) STRICT;
CREATE TRIGGER decisions_are_not_deleted BEFORE DELETE ON decisions BEGIN SELECT RAISE(ABORT, 'decisions are kept'); END;

CREATE TABLE artifacts (
    name         TEXT NOT NULL,
    version      INTEGER NOT NULL,
    object       BLOB CHECK (length(object) = 32),     -- NULL: withdrawn
    bytes        INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    put_by       TEXT NOT NULL,
    at_ms        INTEGER NOT NULL,
    reverts_to   INTEGER NOT NULL,                     -- 0: its content is its own
    restored     BLOB CHECK (length(restored) = 16),   -- the checkpoint before the restore that made it
    PRIMARY KEY (name, version)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER artifacts_are_not_deleted BEFORE DELETE ON artifacts BEGIN SELECT RAISE(ABORT, 'artifacts are kept'); END;
CREATE TRIGGER artifacts_are_not_changed BEFORE UPDATE ON artifacts BEGIN SELECT RAISE(ABORT, 'artifacts are kept'); END;

-- What an idempotency key gave.
CREATE TABLE keys (
    key    TEXT PRIMARY KEY,
    kind   INTEGER NOT NULL,                           -- 1 message, 2 decision, 3 artifact
    name   TEXT NOT NULL,                              -- of the artifact
    number INTEGER NOT NULL,                           -- sequence, id, version
    at_ms  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

ALTER TABLE checkpoints ADD COLUMN step INTEGER NOT NULL DEFAULT 0;
ALTER TABLE checkpoints ADD COLUMN step_name TEXT NOT NULL DEFAULT '';
ALTER TABLE checkpoints ADD COLUMN agent TEXT NOT NULL DEFAULT '';
ALTER TABLE checkpoints ADD COLUMN summary TEXT NOT NULL DEFAULT '';
ALTER TABLE checkpoints ADD COLUMN compacted INTEGER NOT NULL DEFAULT 0;

ALTER TABLE restoring ADD COLUMN supersede_decisions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE restoring ADD COLUMN with_artifacts INTEGER NOT NULL DEFAULT 0;

-- Which messages a checkpoint compacted, by its number. They come back into view when it goes.
CREATE TABLE compacted (
    sequence   INTEGER NOT NULL,
    checkpoint INTEGER NOT NULL,
    PRIMARY KEY (sequence, checkpoint)
) STRICT, WITHOUT ROWID;
CREATE INDEX compacted_by ON compacted (checkpoint, sequence);
CREATE TRIGGER compaction_goes_with_its_checkpoint AFTER DELETE ON checkpoints
BEGIN DELETE FROM compacted WHERE checkpoint = OLD.number; END;
