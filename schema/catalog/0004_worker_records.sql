-- A worker's record belongs to the isolation driver that made it. Workers of the earlier format spoke
-- another protocol: with epoch 0, which no kernel has, they are ended and not adopted.
ALTER TABLE workers ADD COLUMN isolation TEXT NOT NULL DEFAULT 'process'; -- core::spec::Isolation by name
ALTER TABLE workers ADD COLUMN record TEXT NOT NULL DEFAULT '';           -- the driver's own, a JSON object
UPDATE workers SET epoch = 0, record = json_object(
    'socket', socket,
    'process', iif(pid = 0, NULL, json_object('pid', pid, 'start_ticks', start_ticks)),
    'run_as', NULL
);
ALTER TABLE workers DROP COLUMN pid;
ALTER TABLE workers DROP COLUMN start_ticks;
ALTER TABLE workers DROP COLUMN socket;
