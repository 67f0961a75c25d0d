-- Number of path components created in the workspace for the mountpoint; the last may be a file. Removed with the mount.
ALTER TABLE mounts ADD COLUMN made INTEGER NOT NULL DEFAULT 0;
