-- A file of schema version 1, as a gateway of that time left it: one ended and one queued invocation, a key, a log.

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
    overhead_s REAL,
    execution_s REAL,
    node TEXT,
    units TEXT NOT NULL,              -- JSON: granted units by resource kind
    usage TEXT NOT NULL,              -- JSON: measured use
    dead INTEGER NOT NULL,            -- in the dead-letter list
    callback TEXT,                    -- pending, delivered or failed; NULL where none was asked for
    result BLOB                       -- JSON; last, so that a listing never reads its pages
) STRICT;

CREATE INDEX invocations_live ON invocations (seq) WHERE state IN ('queued', 'running');
CREATE INDEX invocations_bad ON invocations (state, seq) WHERE state IN ('failed', 'timed_out', 'cancelled', 'lost');
CREATE INDEX invocations_dead ON invocations (seq) WHERE dead = 1;
CREATE INDEX invocations_callback ON invocations (seq) WHERE callback = 'pending';
CREATE INDEX invocations_function ON invocations (function, seq);
CREATE INDEX invocations_trajectory ON invocations (trajectory, seq) WHERE trajectory IS NOT NULL;

-- Inputs are written once and stay apart, so that a change of state rewrites a short row.
CREATE TABLE inputs (
    seq INTEGER PRIMARY KEY,
    input BLOB NOT NULL
) STRICT;

CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,             -- function and Idempotency-Key
    digest BLOB NOT NULL,             -- of the body
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

CREATE TABLE documents (
    name TEXT PRIMARY KEY,            -- learned history, the health probe
    body TEXT NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO invocations VALUES (
    1, '00000000001-0123456789ab', 'echo', 'r1', 'default', 't-1', NULL, 'async', 1, 1000.0, '{}', 'succeeded', NULL, '', '',
    '{}', NULL, 1, '[]', 1001.0, 1002.0, 1.0, 0.25, 0.75, 'local', '{"cpu":1}', '{}', 0, NULL, x'7b226e223a317d'
);
INSERT INTO invocations VALUES (
    2, '00000000002-0123456789ab', 'echo', 'r1', 'rl', NULL, NULL, 'async', 1, 1003.0, '{"timeout_s":5.0}', 'queued', NULL, '', '',
    '{}', NULL, 1, '[]', NULL, NULL, NULL, NULL, NULL, NULL, '{}', '{}', 0, NULL, NULL
);
INSERT INTO inputs VALUES (1, x'7b226e223a317d'), (2, x'7b226e223a327d');
INSERT INTO idempotency VALUES (char(101, 99, 104, 111, 10, 107), x'00', 2, 9e9);
INSERT INTO log_records VALUES (1, 0, 1001.5, 'stdout', 'hello');
INSERT INTO documents VALUES ('log_bytes', '5');

PRAGMA user_version = 1;
