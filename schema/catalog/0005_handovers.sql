-- Moves of kernels between hosts that need an end: written before the first message, removed with the last.
CREATE TABLE handovers (
    id     BLOB PRIMARY KEY CHECK (length(id) = 16),
    side   INTEGER NOT NULL CHECK (side BETWEEN 0 AND 1),  -- 0 out, 1 in
    kernel BLOB NOT NULL CHECK (length(kernel) = 16),
    uid    INTEGER NOT NULL,
    live   INTEGER NOT NULL CHECK (live BETWEEN 0 AND 1),  -- in: whether the kernel was activated
    record TEXT NOT NULL,                                  -- the supervisor's own, JSON
    at_ms  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
