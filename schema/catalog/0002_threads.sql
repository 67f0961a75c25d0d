-- The kernel that owns this kernel's workspace; NULL: the kernel owns its workspace.
ALTER TABLE kernels ADD COLUMN thread_of BLOB CHECK (thread_of IS NULL OR length(thread_of) = 16);
CREATE INDEX kernels_by_thread_of ON kernels (thread_of) WHERE thread_of IS NOT NULL;
