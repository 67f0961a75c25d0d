-- Checksums of rows (catalog::sums, which adds the triggers of the other tables).
CREATE TABLE sums (
    name TEXT PRIMARY KEY,                            -- of the table
    rows INTEGER NOT NULL,
    sum  BLOB NOT NULL CHECK (length(sum) = 32)       -- of its rows; of the journal, its newest entry's
) STRICT, WITHOUT ROWID;

-- A chain: each entry's checksum includes that of the entry before.
ALTER TABLE journal ADD COLUMN sum BLOB CHECK (length(sum) = 32);
DROP TRIGGER journal_is_not_changed;
WITH RECURSIVE chain (sequence, sum) AS (
    SELECT sequence, row_hash(NULL, sequence, at_ms, kind, actor, exec, text, detail, stdin)
    FROM journal WHERE sequence = (SELECT min(sequence) FROM journal)
    UNION ALL
    SELECT j.sequence, row_hash(chain.sum, j.sequence, j.at_ms, j.kind, j.actor, j.exec, j.text, j.detail, j.stdin)
    FROM chain JOIN journal j ON j.sequence = (SELECT min(sequence) FROM journal WHERE sequence > chain.sequence)
)
UPDATE journal SET sum = chain.sum FROM chain WHERE journal.sequence = chain.sequence;
INSERT INTO sums (name, rows, sum) SELECT 'journal', count(*),
    coalesce((SELECT sum FROM journal ORDER BY sequence DESC LIMIT 1), zeroblob(32)) FROM journal;

CREATE TRIGGER journal_is_not_changed BEFORE UPDATE ON journal WHEN OLD.sum IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER journal_is_chained AFTER INSERT ON journal BEGIN
    SELECT RAISE(ABORT, 'the journal has a later entry')
    WHERE NEW.sequence < (SELECT max(sequence) FROM journal);
    UPDATE journal SET sum = row_hash(
        (SELECT sum FROM journal WHERE sequence < NEW.sequence ORDER BY sequence DESC LIMIT 1), NEW.sequence,
        NEW.at_ms, NEW.kind, NEW.actor, NEW.exec, NEW.text, NEW.detail, NEW.stdin
    ) WHERE sequence = NEW.sequence;
    UPDATE sums SET rows = rows + 1, sum = (SELECT sum FROM journal WHERE sequence = NEW.sequence)
    WHERE name = 'journal';
END;
