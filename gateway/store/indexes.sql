-- What listings need beside the keys and indexes of schema.sql, by name. On a large file of an older gateway each is made
-- when that gateway's successor serves already, and until then a listing looks at so many rows a page.

-- name: invocations_state
CREATE INDEX invocations_state ON invocations (state, seq);
DROP INDEX IF EXISTS invocations_bad;

-- name: invocations_task
CREATE INDEX invocations_task ON invocations (task, seq);

-- name: invocations_parent
CREATE INDEX invocations_parent ON invocations (parent, seq) WHERE parent IS NOT NULL;

-- name: invocations_reason
CREATE INDEX invocations_reason ON invocations (reason, seq) WHERE reason IS NOT NULL;
