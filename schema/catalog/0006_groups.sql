-- Kernels, repositories and databases that are frozen and restored as one.
CREATE TABLE groups (
    id            BLOB PRIMARY KEY CHECK (length(id) = 16),
    uid           INTEGER NOT NULL,
    name          TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    head          BLOB CHECK (head IS NULL OR length(head) = 16),   -- the freeze taken or restored last
    undo          BLOB CHECK (undo IS NULL OR length(undo) = 16),   -- the freeze before the last restore
    intent        TEXT,                                             -- core::freeze::Intent as JSON: begun and not ended
    UNIQUE (uid, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE group_members (
    group_id BLOB NOT NULL REFERENCES groups (id) ON DELETE CASCADE,
    name     TEXT NOT NULL,
    target   TEXT NOT NULL,                                         -- core::freeze::Target as JSON
    kernel   BLOB CHECK (kernel IS NULL OR length(kernel) = 16),
    PRIMARY KEY (group_id, name)
) STRICT, WITHOUT ROWID;

-- The row makes a freeze visible: everything that its manifest names is in the store.
CREATE TABLE freezes (
    id             BLOB PRIMARY KEY CHECK (length(id) = 16),
    group_id       BLOB NOT NULL REFERENCES groups (id) ON DELETE CASCADE,
    number         INTEGER NOT NULL,
    message        TEXT NOT NULL,
    type           INTEGER NOT NULL,
    creator        TEXT NOT NULL,
    at_ms          INTEGER NOT NULL,
    restored_at_ms INTEGER,
    manifest       BLOB NOT NULL CHECK (length(manifest) = 32),
    UNIQUE (group_id, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE freeze_checkpoints (
    freeze     BLOB NOT NULL REFERENCES freezes (id) ON DELETE CASCADE,
    kernel     BLOB NOT NULL CHECK (length(kernel) = 16),
    checkpoint BLOB NOT NULL CHECK (length(checkpoint) = 16),
    PRIMARY KEY (freeze, kernel)
) STRICT, WITHOUT ROWID;
CREATE INDEX freezes_by_checkpoint ON freeze_checkpoints (checkpoint);

-- Which schema revision lived with which commit: the rehydration gate.
CREATE TABLE freeze_schemas (
    freeze       BLOB NOT NULL REFERENCES freezes (id) ON DELETE CASCADE,
    database     TEXT NOT NULL,
    user_version INTEGER NOT NULL,
    schema       TEXT NOT NULL,
    repository   TEXT NOT NULL,
    commit_id    TEXT NOT NULL,
    PRIMARY KEY (freeze, database, repository)
) STRICT, WITHOUT ROWID;
