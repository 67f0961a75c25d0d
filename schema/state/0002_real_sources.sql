-- Where a mount's source led when it was given, symbolic links resolved: what it leads to later is held against it.
ALTER TABLE mounts ADD COLUMN real TEXT;
