-- What a failed freeze does with the kernels of its group, and why they are paused.
ALTER TABLE groups ADD COLUMN on_failure INTEGER NOT NULL DEFAULT 0 CHECK (on_failure BETWEEN 0 AND 1);  -- 0 resume, 1 pause
ALTER TABLE groups ADD COLUMN paused TEXT;                                                               -- absent: not paused
