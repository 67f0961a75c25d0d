-- The newest output of an execution beyond what is kept of its beginning, and the order of its streams.
ALTER TABLE results ADD COLUMN tail BLOB CHECK (length(tail) <= 65536);
ALTER TABLE results ADD COLUMN tail_runs BLOB;
