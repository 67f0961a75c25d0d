-- How the present state came to be. No row: it is the kernel's own.
CREATE TABLE origin (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    kind       INTEGER NOT NULL CHECK (kind BETWEEN 0 AND 2), -- the place in OriginKind::ALL
    generation INTEGER NOT NULL CHECK (generation >= 0),      -- how often it was restored or forked
    kernel     BLOB CHECK (length(kernel) = 16),              -- from whom it was forked,
    name       TEXT,                                          -- what that one was called then,
    checkpoint BLOB CHECK (length(checkpoint) = 16),          -- and at which of its checkpoints
    restored   BLOB CHECK (length(restored) = 16)             -- the checkpoint that was restored last
) STRICT;
