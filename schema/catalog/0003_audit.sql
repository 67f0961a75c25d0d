-- Lines that were there stay as they are, in format 1: the chain goes on from them. `core::audit` has both encodings.
ALTER TABLE audit ADD COLUMN format INTEGER NOT NULL DEFAULT 1;
ALTER TABLE audit ADD COLUMN owner INTEGER;    -- whose kernel it is
ALTER TABLE audit ADD COLUMN manifest BLOB;    -- of the checkpoint that it concerns
ALTER TABLE audit ADD COLUMN detail TEXT NOT NULL DEFAULT '';
CREATE INDEX audit_by_owner ON audit (owner, sequence);
