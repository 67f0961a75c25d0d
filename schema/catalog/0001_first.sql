-- catalog.db: what the host knows of itself and of all its kernels. One process owns it; one thread writes it.

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

-- What a new daemon needs to find, prove and adopt the workers of the former one. A worker may outlive its kernel's row
-- (removed while the daemon died), so there is no reference: an orphan must stay known until it is gone.
CREATE TABLE workers (
    id          BLOB PRIMARY KEY CHECK (length(id) = 16),
    kernel      BLOB NOT NULL CHECK (length(kernel) = 16),
    epoch       INTEGER NOT NULL,
    build       TEXT NOT NULL,
    secret      BLOB NOT NULL,
    pid         INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,            -- field 22 of /proc/PID/stat: tells a reused pid
    socket      TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    scope         TEXT NOT NULL,             -- who and for what, for example 'create/1000'
    key           TEXT NOT NULL,
    result        TEXT NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_by_expiry ON keys (expires_at_ms);

-- Numbered without holes; the oldest go. The newest never goes, so a number is never given twice.
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY,
    at_ms    INTEGER NOT NULL,
    kernel   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    detail   TEXT NOT NULL
) STRICT;

-- Append-only; each line holds the hash of the one before (catalog::audit has the encoding).
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
