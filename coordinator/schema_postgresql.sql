-- The coordinator's store in PostgreSQL, in a schema of its own: schema.sql, and who leads. One run a database; see
-- docs/decisions/0068-a-standby.md.
CREATE TABLE format (
    version  INTEGER NOT NULL
);

CREATE TABLE head (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    term     BIGINT  NOT NULL,       -- how often a coordinator began to lead; the fencing token of each transaction
    total    BYTEA   NOT NULL,       -- the checksums of all records, added without carry: none is missing or an old one
    checksum BYTEA   NOT NULL        -- of the other columns
);

CREATE TABLE records (               -- of each key the newest; what replaces what: coordinator/core/persisted.py
    seq      BIGINT  PRIMARY KEY,    -- in the order in which they were written
    kind     TEXT    NOT NULL,
    number   BIGINT  NOT NULL,       -- of a commit, sync, branch or line
    part     BIGINT  NOT NULL,       -- the id of a site, or the number of an attempt
    name     TEXT    NOT NULL,
    body     BYTEA   NOT NULL,       -- JSON by field; messages in it as base64 of their protobuf
    kept_at  DOUBLE PRECISION NOT NULL, -- seconds since 1970, for people
    checksum BYTEA   NOT NULL,       -- of the other columns
    UNIQUE (kind, number, part, name)
);

CREATE TABLE lease (                 -- who leads; changed by this database's clock alone
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    holder   TEXT    NOT NULL,       -- a start of a coordinator
    address  TEXT    NOT NULL,       -- where sites reach it
    until    TIMESTAMPTZ NOT NULL,
    stage    TEXT                    -- which roots are trusted, and which signs: stage.py; NULL before the first start
);

INSERT INTO lease (id, holder, address, until) VALUES (1, '', '', to_timestamp(0));

CREATE TABLE standbys (
    holder   TEXT    PRIMARY KEY,
    address  TEXT    NOT NULL,
    roots    TEXT    NOT NULL,       -- digests of those whose keys it has
    seen_at  TIMESTAMPTZ NOT NULL
)
