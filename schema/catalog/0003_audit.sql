-- Existing lines keep format 1, and the chain continues from them. `core::audit` has both encodings.
ALTER TABLE audit ADD COLUMN format INTEGER NOT NULL DEFAULT 1;
ALTER TABLE audit ADD COLUMN owner INTEGER;    -- owner of the kernel
ALTER TABLE audit ADD COLUMN manifest BLOB;    -- of the checkpoint concerned
ALTER TABLE audit ADD COLUMN detail TEXT NOT NULL DEFAULT '';
CREATE INDEX audit_by_owner ON audit (owner, sequence);
