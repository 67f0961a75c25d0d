-- JSON: the rich forms of an execution's results, in order, each with `mime` and `data` in Base64.
ALTER TABLE results ADD COLUMN displays TEXT;
