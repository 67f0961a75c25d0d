-- Origin of the current state. No row: OriginKind::Original.
CREATE TABLE origin (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    kind       INTEGER NOT NULL CHECK (kind BETWEEN 0 AND 2), -- the index in OriginKind::ALL
    generation INTEGER NOT NULL CHECK (generation >= 0),      -- number of restores and forks
    kernel     BLOB CHECK (length(kernel) = 16),              -- the parent of a fork,
    name       TEXT,                                          -- the parent's name at that time,
    checkpoint BLOB CHECK (length(checkpoint) = 16),          -- and the parent's checkpoint
    restored   BLOB CHECK (length(restored) = 16)             -- the last restored checkpoint
) STRICT;
