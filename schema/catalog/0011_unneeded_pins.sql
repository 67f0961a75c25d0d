-- Checkpoints that are pinned for a freeze that is removed, or not sealed yet: the next start of the daemon lifts the pins of
-- those that no freeze needs.
CREATE TABLE unneeded_pins (
    kernel     BLOB NOT NULL CHECK (length(kernel) = 16),
    checkpoint BLOB NOT NULL CHECK (length(checkpoint) = 16),
    PRIMARY KEY (kernel, checkpoint)
) STRICT, WITHOUT ROWID;
