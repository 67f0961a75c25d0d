-- engine.db: the engine's state, written by the worker's init after every execution that changed something.

CREATE TABLE engine (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    name    TEXT NOT NULL,
    version TEXT NOT NULL,
    format  INTEGER NOT NULL                 -- of the entries as a whole; a body's first byte is its own format
) STRICT;

CREATE TABLE entries (
    id     INTEGER PRIMARY KEY,
    key    TEXT NOT NULL UNIQUE,
    meta   TEXT NOT NULL,                    -- JSON
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    size   INTEGER NOT NULL,
    exec   INTEGER NOT NULL,                 -- the last execution that changed the entry; 0: none
    body   BLOB                              -- NULL: in chunks
) STRICT;

CREATE TABLE chunks (
    entry INTEGER NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
    part  INTEGER NOT NULL,
    body  BLOB NOT NULL,
    PRIMARY KEY (entry, part)
) STRICT;

CREATE TABLE missed (
    key    TEXT PRIMARY KEY,
    type   TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE jobs (
    id      TEXT PRIMARY KEY,
    command TEXT NOT NULL
) STRICT, WITHOUT ROWID;
