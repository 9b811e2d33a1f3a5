-- The record of the gateway, as steps from one version to the next: a file of an older one sees those that it lacks.
-- A step that was released never changes. Times are wall-clock seconds; durations end in _s too and say so by name.

-- version: 1

CREATE TABLE invocations (
    seq INTEGER PRIMARY KEY,          -- order of acceptance; the id tells it, so no second index is needed
    id TEXT NOT NULL,
    function TEXT NOT NULL,
    revision TEXT NOT NULL,
    task TEXT NOT NULL,
    trajectory TEXT,
    parent TEXT,
    mode TEXT NOT NULL,
    detached INTEGER NOT NULL,
    accepted_s REAL NOT NULL,
    options TEXT NOT NULL,            -- JSON: what a restart must know of the caller's choices
    state TEXT NOT NULL,
    reason TEXT,
    message TEXT NOT NULL,
    component TEXT NOT NULL,
    detail TEXT NOT NULL,             -- JSON
    retry_after_s REAL,
    attempt INTEGER NOT NULL,
    attempts TEXT NOT NULL,           -- JSON: finished tries before the last
    started_s REAL,
    ended_s REAL,
    queue_s REAL,
    overhead_s REAL,                  -- of a running action: set once its own work has begun
    execution_s REAL,
    node TEXT,
    units TEXT NOT NULL,              -- JSON: granted units by resource kind
    usage TEXT NOT NULL,              -- JSON: measured use
    dead INTEGER NOT NULL,            -- in the dead-letter list
    callback TEXT,                    -- pending, delivered or failed; NULL where none was asked for
    result BLOB                       -- JSON; last, so that a listing never reads its pages
) STRICT;

CREATE INDEX invocations_live ON invocations (seq) WHERE state IN ('queued', 'running');

-- What listings choose by (`gateway.store.store`).
CREATE INDEX invocations_state ON invocations (state, seq);
CREATE INDEX invocations_dead ON invocations (seq) WHERE dead = 1;
CREATE INDEX invocations_function ON invocations (function, seq);
CREATE INDEX invocations_task ON invocations (task, seq);
CREATE INDEX invocations_trajectory ON invocations (trajectory, seq) WHERE trajectory IS NOT NULL;
CREATE INDEX invocations_parent ON invocations (parent, seq) WHERE parent IS NOT NULL;
CREATE INDEX invocations_reason ON invocations (reason, seq) WHERE reason IS NOT NULL;

-- Inputs are written once and stay apart, so that a change of state rewrites a short row.
CREATE TABLE inputs (
    seq INTEGER PRIMARY KEY,
    input BLOB NOT NULL
) STRICT;

CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,             -- function and Idempotency-Key
    digest BLOB NOT NULL,             -- of the body and the trajectory
    seq INTEGER NOT NULL,
    expires_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_expires ON idempotency (expires_s);

CREATE TABLE log_records (
    seq INTEGER NOT NULL,
    position INTEGER NOT NULL,        -- from 0, without holes
    time_s REAL NOT NULL,
    stream TEXT NOT NULL,             -- stdout, stderr, log or system
    data TEXT NOT NULL,
    PRIMARY KEY (seq, position)
) STRICT, WITHOUT ROWID;

-- Logs that retention removed before their records: a reader is told.
CREATE TABLE expired_logs (
    seq INTEGER PRIMARY KEY,
    records INTEGER NOT NULL,         -- how many there were
    expired_s REAL NOT NULL
) STRICT;

-- Callbacks that wait to be delivered: noted with the end, gone with the last try.
CREATE TABLE deliveries (
    seq INTEGER PRIMARY KEY,
    host TEXT NOT NULL,               -- host and port of the receiver: one that is dead holds up no other
    due_s REAL NOT NULL,              -- next try
    tries INTEGER NOT NULL            -- so far
) STRICT;
CREATE INDEX deliveries_due ON deliveries (host, due_s);

CREATE TABLE documents (
    name TEXT PRIMARY KEY,            -- learned history, the health probe
    body TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Trajectories that have an environment: what the next gateway adopts, or says that it is lost.
CREATE TABLE trajectories (
    name TEXT PRIMARY KEY,
    task TEXT NOT NULL,
    memory_bytes INTEGER NOT NULL,
    ttl_s REAL NOT NULL,
    sandbox TEXT NOT NULL,            -- what it has chosen, as JSON; empty if that is its function's own
    node TEXT NOT NULL,               -- empty for the gateway's own machine
    holds TEXT NOT NULL               -- which clients hold it, and for how long (s), as JSON; empty for nobody
) STRICT, WITHOUT ROWID;

-- Machines that have joined: what the next gateway waits for, and by which key it knows them again.
CREATE TABLE nodes (
    name TEXT PRIMARY KEY,
    spec TEXT NOT NULL,               -- cores, memory and labels, as JSON
    key_digest TEXT NOT NULL,         -- SHA-256 of its key
    state TEXT NOT NULL,              -- ready, draining or lost: whoever is lost is not waited for
    joined_s REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Steps of tasks that a trainer told of, and the trajectories that live under them.
CREATE TABLE steps (
    task TEXT NOT NULL,
    number INTEGER NOT NULL,
    opened_s REAL NOT NULL,
    expected INTEGER,                 -- rollouts; NULL until it is told
    ended INTEGER NOT NULL,           -- of them
    ended_s REAL,                     -- when the last expected one did
    most_living INTEGER NOT NULL,     -- at once
    sample_s TEXT NOT NULL,           -- JSON: some of their lifetimes
    PRIMARY KEY (task, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE step_trajectories (
    trajectory TEXT PRIMARY KEY,
    task TEXT NOT NULL,
    number INTEGER NOT NULL,
    since_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
