-- catalog.db: the host and all its kernels. One process owns the database; one thread writes it.

CREATE TABLE host (
    one           INTEGER PRIMARY KEY CHECK (one = 1),
    id            BLOB NOT NULL CHECK (length(id) = 16),
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE kernels (
    id              BLOB PRIMARY KEY CHECK (length(id) = 16),
    uid             INTEGER NOT NULL,
    name            TEXT NOT NULL,
    spec            TEXT NOT NULL,           -- core::spec::KernelSpec as JSON
    state           TEXT NOT NULL,           -- the state record as JSON
    version         INTEGER NOT NULL CHECK (version > 0),
    epoch           INTEGER NOT NULL CHECK (epoch >= 0),
    generation      INTEGER NOT NULL CHECK (generation >= 0),
    created_at_ms   INTEGER NOT NULL,
    last_used_at_ms INTEGER NOT NULL,
    UNIQUE (uid, name)
) STRICT, WITHOUT ROWID;

-- For finding, authenticating and adopting the workers of a former daemon. A worker may outlive its kernel's row
-- (removal during a crash of the daemon), so there is no foreign key: an orphan's row stays until its worker has ended.
CREATE TABLE workers (
    id          BLOB PRIMARY KEY CHECK (length(id) = 16),
    kernel      BLOB NOT NULL CHECK (length(kernel) = 16),
    epoch       INTEGER NOT NULL,
    build       TEXT NOT NULL,
    secret      BLOB NOT NULL,
<<<<<<< HEAD
    pid         INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,            -- field 22 of /proc/PID/stat: tells a reused pid
    socket      TEXT NOT NULL
=======
    isolation   TEXT NOT NULL,               -- core::spec::Isolation by name
    record      TEXT NOT NULL                -- private to the isolation driver, a JSON object
>>>>>>> 3c7c0fe (Reword the comments of the database schemas)
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    scope         TEXT NOT NULL,             -- operation and user, for example 'create/1000'
    key           TEXT NOT NULL,
    result        TEXT NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_by_expiry ON keys (expires_at_ms);

-- Numbered without gaps. The oldest rows are deleted, the newest never, so no number is reused.
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY,
    at_ms    INTEGER NOT NULL,
    kernel   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    detail   TEXT NOT NULL
) STRICT;

-- Append-only. Each line contains the hash of the previous line (encoding: core::audit).
CREATE TABLE audit (
    sequence       INTEGER PRIMARY KEY,
    at_ms          INTEGER NOT NULL,
    uid            INTEGER NOT NULL,
    client         TEXT NOT NULL,
    action         TEXT NOT NULL,
    kernel         TEXT NOT NULL,
    version_before INTEGER,
    version_after  INTEGER,
    outcome        TEXT NOT NULL,
    hash           BLOB NOT NULL CHECK (length(hash) = 32)
) STRICT;
CREATE INDEX audit_by_kernel ON audit (kernel, sequence);
CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
