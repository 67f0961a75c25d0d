-- The highest number of a freeze of the group that was removed: no later freeze gets it.
ALTER TABLE groups ADD COLUMN removed INTEGER NOT NULL DEFAULT 0;

-- Which schema revision lived with which commit at freezes that were removed: the rehydration gate still judges by them.
CREATE TABLE removed_schemas (
    group_id     BLOB NOT NULL REFERENCES groups (id) ON DELETE CASCADE,
    number       INTEGER NOT NULL,                                  -- of the first such freeze
    database     TEXT NOT NULL,
    user_version INTEGER NOT NULL,
    schema       TEXT NOT NULL,
    repository   TEXT NOT NULL,
    commit_id    TEXT NOT NULL,
    PRIMARY KEY (group_id, database, user_version, schema, repository, commit_id)
) STRICT, WITHOUT ROWID;
