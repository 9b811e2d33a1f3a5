-- The statements that the store runs, by name; {record} stands for the columns of a record, which `gateway.store.store`
-- derives from its fields, as it does the statement that saves one.

-- name: save_input
INSERT OR IGNORE INTO inputs (seq, input) VALUES (?, ?);

-- name: save_key
INSERT OR REPLACE INTO idempotency (key, digest, seq, expires_s) VALUES (?, ?, ?, ?);

-- name: save_log
INSERT OR IGNORE INTO log_records (seq, position, time_s, stream, data) VALUES (?, ?, ?, ?, ?);

-- name: save_document
INSERT OR REPLACE INTO documents (name, body) VALUES (?, ?);

-- name: save_trajectory
INSERT OR REPLACE INTO trajectories (name, task, memory_bytes, ttl_s, sandbox, node, holds) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: delete_trajectory
DELETE FROM trajectories WHERE name = ?;

-- name: trajectories
SELECT name, task, memory_bytes, ttl_s, sandbox, node, holds FROM trajectories ORDER BY name;

-- name: nodes
SELECT name, spec, key_digest, state, joined_s FROM nodes ORDER BY name;

-- name: save_node
INSERT OR REPLACE INTO nodes (name, spec, key_digest, state, joined_s) VALUES (?, ?, ?, ?, ?);

-- name: delete_node
DELETE FROM nodes WHERE name = ?;

-- name: steps
SELECT task, number, opened_s, expected, ended, ended_s, most_living, sample_s FROM steps ORDER BY opened_s, number;

-- name: save_step
INSERT OR REPLACE INTO steps (task, number, opened_s, expected, ended, ended_s, most_living, sample_s)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: delete_step
DELETE FROM steps WHERE task = ? AND number = ?;

-- name: step_trajectories
SELECT trajectory, task, number, since_s FROM step_trajectories ORDER BY since_s, trajectory;

-- name: save_step_trajectory
INSERT OR REPLACE INTO step_trajectories (trajectory, task, number, since_s) VALUES (?, ?, ?, ?);

-- name: delete_step_trajectory
DELETE FROM step_trajectories WHERE trajectory = ?;

-- name: delete_step_trajectories
DELETE FROM step_trajectories WHERE task = ? AND number = ?;

-- A key outlives its record where records are pruned by size: it must never come to mean another.
-- name: last_seq
SELECT max(
    (SELECT coalesce(max(seq), 0) FROM invocations), (SELECT coalesce(max(seq), 0) FROM idempotency)
);

-- name: get
SELECT {record}, p.input FROM invocations i LEFT JOIN inputs p USING (seq) WHERE i.seq = ?;

-- name: unfinished
SELECT {record}, p.input FROM invocations i LEFT JOIN inputs p USING (seq)
WHERE i.state IN ('queued', 'running') ORDER BY i.seq;

-- The callbacks of each host that are due first, as many as may be under way there.
-- name: deliveries
WITH RECURSIVE hosts (host) AS (
    SELECT min(host) FROM deliveries
    UNION ALL SELECT (SELECT min(host) FROM deliveries WHERE host > hosts.host) FROM hosts WHERE hosts.host IS NOT NULL
)
SELECT d.seq, d.host, d.due_s, d.tries FROM hosts JOIN deliveries d
ON d.seq IN (SELECT seq FROM deliveries WHERE host = hosts.host ORDER BY due_s, seq LIMIT ?) ORDER BY d.due_s, d.seq;

-- name: save_delivery
INSERT OR REPLACE INTO deliveries (seq, host, due_s, tries) VALUES (?, ?, ?, ?);

-- name: delete_delivery
DELETE FROM deliveries WHERE seq = ?;

-- name: set_callback
UPDATE invocations SET callback = ? WHERE seq = ?;

-- name: let_go
UPDATE invocations SET dead = 0 WHERE seq = ?;

-- name: key
SELECT digest, seq FROM idempotency WHERE key = ? AND expires_s > ?;

-- What retention removed reads as one record in the place of the last.
-- name: logs
SELECT position, time_s, stream, data FROM log_records WHERE seq = ?1 AND position >= ?2
UNION ALL
SELECT records - 1, expired_s, 'expired', 'this log was removed by age or size (server.retention): ' || records || ' records'
FROM expired_logs WHERE seq = ?1 AND records > ?2
ORDER BY position LIMIT ?3;

-- name: logs_written
SELECT stream, count(*) AS records, max(position) + 1 AS end, sum(length(CAST(data AS BLOB))) AS bytes,
    sum(CASE WHEN time_s >= ? THEN length(CAST(data AS BLOB)) ELSE 0 END) AS recent_bytes
FROM log_records WHERE seq = ? GROUP BY stream;

-- name: counts
SELECT state, count(*) FROM invocations GROUP BY state;

-- name: remove_document
DELETE FROM documents WHERE name = ?;

-- Those whose names begin so.
-- name: document_names
SELECT name FROM documents WHERE substr(name, 1, length(?1)) = ?1;

-- name: document
SELECT body FROM documents WHERE name = ?;

-- name: oldest
SELECT seq, state, coalesce(ended_s, accepted_s) AS ended_s, accepted_s, dead FROM invocations ORDER BY seq;

-- name: oldest_log
SELECT min(seq) FROM log_records WHERE seq > ?;

-- name: ended
SELECT state, coalesce(ended_s, accepted_s) AS ended_s FROM invocations WHERE seq = ?;

-- Bytes of all log text, kept as a number in a document: nothing ever scans them.
-- name: count_log_bytes
INSERT INTO documents (name, body) VALUES ('log_bytes', ?)
ON CONFLICT (name) DO UPDATE SET body = CAST(body AS INTEGER) + CAST(excluded.body AS INTEGER);

-- name: log_bytes
SELECT CAST(body AS INTEGER) FROM documents WHERE name = 'log_bytes';

-- name: log_bytes_of
SELECT coalesce(sum(length(CAST(data AS BLOB))), 0) FROM log_records WHERE seq = ?;

-- name: delete_invocation
DELETE FROM invocations WHERE seq = ?;

-- name: delete_input
DELETE FROM inputs WHERE seq = ?;

-- name: delete_logs
DELETE FROM log_records WHERE seq = ?;

-- name: expire_log
INSERT INTO expired_logs (seq, records, expired_s)
SELECT seq, max(position) + 1, ?2 FROM log_records
WHERE seq = ?1 AND EXISTS (SELECT 1 FROM invocations WHERE seq = ?1) GROUP BY seq
ON CONFLICT (seq) DO UPDATE SET records = excluded.records, expired_s = excluded.expired_s;

-- name: delete_expired_log
DELETE FROM expired_logs WHERE seq = ?;

-- name: delete_keys
DELETE FROM idempotency WHERE key IN (SELECT key FROM idempotency WHERE expires_s <= ? LIMIT ?);
