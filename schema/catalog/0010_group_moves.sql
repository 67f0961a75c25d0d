-- Moves of groups between hosts that need an end. At the source, state 1 is the decision: every kernel of the record has
-- departed with it.
CREATE TABLE group_moves (
    id       BLOB PRIMARY KEY CHECK (length(id) = 16),
    side     INTEGER NOT NULL CHECK (side BETWEEN 0 AND 1),  -- 0 out, 1 in
    group_id BLOB NOT NULL CHECK (length(group_id) = 16),
    uid      INTEGER NOT NULL,
    state    INTEGER NOT NULL CHECK (state BETWEEN 0 AND 2), -- core::handover::group::Stage
    record   TEXT NOT NULL,                                  -- the supervisor's own, JSON
    at_ms    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
