-- The transition that has begun to change the kernel. Recovery finishes or reverts it before code runs.
CREATE TABLE transition (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    record TEXT NOT NULL                              -- core::kernel::transition::Record as JSON
) STRICT;

-- A restore was the only transition with a record.
INSERT INTO transition (one, record)
SELECT 1, json_object(
    'transition', json_object(
        'kind', 'restore',
        'target', lower(hex(target)),
        'safety', lower(hex(safety)),
        'options', json_object(
            'supersede_decisions', json(iif(supersede_decisions, 'true', 'false')),
            'with_artifacts', json(iif(with_artifacts, 'true', 'false'))
        )
    ),
    'decision', 'open',
    'actor', actor,
    'atMs', at_ms
) FROM restoring;

DROP TABLE restoring;
