-- How many folders of the workspace a mount had to make for its place, the last perhaps a file: they go with it.
ALTER TABLE mounts ADD COLUMN made INTEGER NOT NULL DEFAULT 0;
