-- The coordinator's store. One run a file; see docs/decisions and coordinator/store.py. Every checksum is of the
-- table's name and the row's other columns, see row_checksums.py.
CREATE TABLE run (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    run_id        TEXT    NOT NULL,
    settings_json TEXT    NOT NULL,
    parent_json   TEXT    NOT NULL,           -- parent run, commit, run_step, run_tokens of a resumed run, or ''
    term          INTEGER NOT NULL,           -- how often a coordinator was started on this store
    stop_reason   TEXT    NOT NULL DEFAULT '',
    final_commit  INTEGER,                    -- set when the run is over
    final_reason  TEXT,
    last_site_id  INTEGER NOT NULL DEFAULT 0, -- at least the ids of sites that are not in sites any more
    checksum      BLOB    NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE manifest (
    id               INTEGER PRIMARY KEY CHECK (id = 1),
    manifest         BLOB NOT NULL,           -- protobuf atoll.protocol.v1.Manifest
    data_fingerprint BLOB NOT NULL,
    checksum         BLOB NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE sites (
    site_id               INTEGER PRIMARY KEY, -- never given to another site
    name                  TEXT    NOT NULL UNIQUE,
    key_digest            BLOB    NOT NULL,    -- of the node's key; the key itself is not kept
    incarnation           INTEGER NOT NULL,
    address               TEXT    NOT NULL,
    live                  INTEGER NOT NULL,
    evicted               TEXT    NOT NULL,    -- why this incarnation was evicted, or ''
    epoch                 INTEGER NOT NULL,
    max_retained_bytes    INTEGER NOT NULL,
    bandwidth_bytes_per_s INTEGER NOT NULL,
    contributed           INTEGER NOT NULL,    -- to a commit, ever
    strikes               INTEGER NOT NULL,    -- how often it was found out, less those that are forgiven
    has_contributed       INTEGER NOT NULL,    -- since it was admitted
    voided_sync           INTEGER NOT NULL,    -- the last sync in which a plan listed it and it discarded its contribution
    may_hold              INTEGER NOT NULL,    -- while it is not live: the newest commit that its disk may have
    checksum              BLOB    NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE syncs (
    sync     INTEGER PRIMARY KEY,              -- never used again
    open     BLOB NOT NULL,                    -- protobuf atoll.protocol.v1.Open
    expected TEXT NOT NULL,                    -- JSON list of site ids
    outcome  TEXT NOT NULL DEFAULT 'open',     -- open, committed, or why it was abandoned
    ended_at REAL,                             -- seconds since 1970, for people
    checksum BLOB NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE plans (                           -- of the open sync; those of ended ones are dropped
    sync     INTEGER NOT NULL,
    attempt  INTEGER NOT NULL,
    plan     BLOB    NOT NULL,                 -- protobuf atoll.protocol.v1.Plan
    ranges   TEXT    NOT NULL,                 -- JSON list, of each contributor what it was trained on
    said     TEXT    NOT NULL,                 -- JSON list, of each contributor the tokens of its Ready
    checksum BLOB    NOT NULL DEFAULT x'',
    PRIMARY KEY (sync, attempt)
) STRICT;

CREATE TABLE commits (
    commit_number INTEGER PRIMARY KEY,
    body          BLOB    NOT NULL,            -- protobuf atoll.protocol.v1.Commit
    run_step      INTEGER NOT NULL,
    run_tokens    INTEGER NOT NULL,
    mean_loss     REAL,
    median_loss   REAL,
    cut           TEXT    NOT NULL,            -- JSON list: whose weights were cut, in words
    stood_out     BLOB,                        -- protobuf atoll.protocol.v1.Outlier: the contribution that did so
    committed_at  REAL    NOT NULL,            -- seconds since 1970, for people
    checksum      BLOB    NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE data_lines (                      -- ranges in all three: JSON, [first, number of samples]
    line        INTEGER PRIMARY KEY,           -- 0, or a site's id if data = "local"
    num_samples INTEGER NOT NULL,
    frontier    INTEGER NOT NULL,              -- positions from here on were never leased
    returned    TEXT    NOT NULL,              -- were leased and are open again
    done        TEXT,                          -- are listed in commits
    checksum    BLOB    NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE data_leases (
    line        INTEGER NOT NULL,
    site_id     INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,              -- 0: kept for a commit that may still list them
    ranges      TEXT    NOT NULL,
    checksum    BLOB    NOT NULL DEFAULT x'',
    PRIMARY KEY (line, site_id, incarnation)
) STRICT;

CREATE TABLE rollbacks (                       -- nobody could reach the commits after commit_number any more
    branch         INTEGER PRIMARY KEY,        -- in which commits are numbered from there on
    commit_number  INTEGER NOT NULL,
    reason         TEXT    NOT NULL,
    rolled_back_at REAL    NOT NULL,           -- seconds since 1970, for people
    checksum       BLOB    NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE exclusions (                      -- the newest: a reducer found a contribution absurd, left out of that sync
    sync        INTEGER NOT NULL,
    site_id     INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,              -- in which it was found
    incarnation INTEGER NOT NULL,
    by_site_id  INTEGER NOT NULL,              -- the reducer
    reason      TEXT    NOT NULL,
    excluded_at REAL    NOT NULL,              -- seconds since 1970, for people
    checksum    BLOB    NOT NULL DEFAULT x'',
    PRIMARY KEY (sync, site_id)
) STRICT;

CREATE TABLE voided_commits (                  -- as they were in commits, with the branch that took their place
    branch        INTEGER NOT NULL,
    commit_number INTEGER NOT NULL,
    body          BLOB    NOT NULL,
    committed_at  REAL    NOT NULL,
    checksum      BLOB    NOT NULL DEFAULT x'',
    PRIMARY KEY (branch, commit_number)
) STRICT;

CREATE TABLE attestations (
    commit_number INTEGER PRIMARY KEY,
    state_hash    BLOB NOT NULL,
    checksum      BLOB NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE kept_out (                        -- sites that a person does not want in the run
    name        TEXT PRIMARY KEY,
    key_digest  BLOB NOT NULL,                 -- empty: it was never here
    reason      TEXT NOT NULL,
    kept_out_at REAL NOT NULL,                 -- seconds since 1970, for people
    checksum    BLOB NOT NULL DEFAULT x''
) STRICT;

CREATE TABLE void_starts (                     -- starting states that were taken back before training
    state_hash BLOB PRIMARY KEY,
    voided_at  REAL NOT NULL,                  -- seconds since 1970, for people
    checksum   BLOB NOT NULL DEFAULT x''
) STRICT;
