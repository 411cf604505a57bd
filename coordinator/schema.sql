-- The coordinator's store. One run a file; see docs/decisions/0029-the-store-is-a-fold.md.
CREATE TABLE head (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    term     INTEGER NOT NULL,       -- how often a coordinator was started on this store
    total    BLOB    NOT NULL,       -- the checksums of all records, added without carry: none is missing or an old one
    checksum BLOB    NOT NULL        -- of the other columns
) STRICT;

CREATE TABLE records (               -- of each key the newest; what replaces what: coordinator/core/persisted.py
    seq      INTEGER PRIMARY KEY,    -- in the order in which they were written
    kind     TEXT    NOT NULL,
    number   INTEGER NOT NULL,       -- of a commit, sync, branch or line
    part     INTEGER NOT NULL,       -- the id of a site, or the number of an attempt
    name     TEXT    NOT NULL,
    body     BLOB    NOT NULL,       -- JSON by field; messages in it as base64 of their protobuf
    kept_at  REAL    NOT NULL,       -- seconds since 1970, for people
    checksum BLOB    NOT NULL,       -- of the other columns
    UNIQUE (kind, number, part, name)
) STRICT;
