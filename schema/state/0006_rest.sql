-- Number of the journal's newest entry when the kernel came to its head: what came later is not in it.
ALTER TABLE head ADD COLUMN journal INTEGER NOT NULL DEFAULT 0;
