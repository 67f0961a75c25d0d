-- The mount's source when it was granted, symbolic links resolved. Later resolutions must give the same path.
ALTER TABLE mounts ADD COLUMN real TEXT;
