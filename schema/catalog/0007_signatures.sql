-- Who sealed a freeze: both are absent of freezes of earlier releases.
ALTER TABLE freezes ADD COLUMN signer BLOB CHECK (signer IS NULL OR length(signer) = 32);       -- public key
ALTER TABLE freezes ADD COLUMN signature BLOB CHECK (signature IS NULL OR length(signature) = 64);

-- The public keys that this host had, the present one among them.
CREATE TABLE host_keys (
    key   BLOB PRIMARY KEY CHECK (length(key) = 32),
    at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Keys of other hosts, or former ones of this host, that a user trusts.
CREATE TABLE trusted_keys (
    uid   INTEGER NOT NULL,
    name  TEXT NOT NULL,
    key   BLOB NOT NULL CHECK (length(key) = 32),
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (uid, name),
    UNIQUE (uid, key)
) STRICT, WITHOUT ROWID;
