-- state.db: history and grants of one kernel. Only the daemon writes it.

-- Append-only. No other table has the code of executions.
CREATE TABLE journal (
    sequence INTEGER PRIMARY KEY,
    at_ms    INTEGER NOT NULL,
    kind     INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 3), -- 1 execution, 2 message, 3 mark
    actor    TEXT NOT NULL,
    exec     INTEGER,
    text     TEXT NOT NULL,
    detail   TEXT,                           -- JSON: the rest of the request; a message's role
    stdin    BLOB,
    CHECK ((kind = 1) = (exec IS NOT NULL))
) STRICT;
CREATE TRIGGER journal_is_not_deleted BEFORE DELETE ON journal BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER journal_is_not_changed BEFORE UPDATE ON journal BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;

-- Inserted before the execution starts, closed once, never deleted: no number is reused.
CREATE TABLE executions (
    id              INTEGER PRIMARY KEY,
    journal         INTEGER NOT NULL,        -- sequence in the journal
    key             TEXT,
    started_at_ms   INTEGER NOT NULL,
    status          INTEGER,                 -- NULL: running; else the index in ExecStatus::ALL
    code            INTEGER,
    err             TEXT,
    duration_us     INTEGER,
    ended_at_ms     INTEGER,
    output_bytes    INTEGER NOT NULL DEFAULT 0,
    truncated_bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX executions_by_key ON executions (key, id) WHERE key IS NOT NULL;
CREATE INDEX executions_running ON executions (id) WHERE status IS NULL;
CREATE TRIGGER executions_are_not_deleted BEFORE DELETE ON executions BEGIN SELECT RAISE(ABORT, 'executions are kept'); END;

-- Results of executions, if any. A stream is inline or an object of the store.
CREATE TABLE results (
    exec          INTEGER PRIMARY KEY,
    value         TEXT,
    output        TEXT,
    runs          BLOB,                      -- order of the streams' parts (state::output)
    stdout_object BLOB CHECK (length(stdout_object) = 32),
    stdout_bytes  INTEGER NOT NULL DEFAULT 0,
    stderr_object BLOB CHECK (length(stderr_object) = 32),
    stderr_bytes  INTEGER NOT NULL DEFAULT 0,
    stdout        BLOB,
    stderr        BLOB
) STRICT;

CREATE TABLE mounts (
    path     TEXT PRIMARY KEY,
    source   TEXT NOT NULL,
    writable INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE mcp_servers (
    name      TEXT PRIMARY KEY,
    transport TEXT NOT NULL                  -- core::info::McpTransport as JSON
) STRICT, WITHOUT ROWID;

CREATE TABLE blob_grants (
    digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
    at_ms  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE lease (
    one           INTEGER PRIMARY KEY CHECK (one = 1),
    holder        TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE consents (
    sequence INTEGER PRIMARY KEY,
    at_ms    INTEGER NOT NULL,
    actor    TEXT NOT NULL,
    subject  TEXT NOT NULL,
    granted  INTEGER NOT NULL,
    detail   TEXT NOT NULL
) STRICT;
CREATE TRIGGER consents_are_not_deleted BEFORE DELETE ON consents BEGIN SELECT RAISE(ABORT, 'consents are kept'); END;
CREATE TRIGGER consents_are_not_changed BEFORE UPDATE ON consents BEGIN SELECT RAISE(ABORT, 'consents are kept'); END;
