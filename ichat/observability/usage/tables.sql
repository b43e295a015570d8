-- The tables of the ledger.

CREATE TABLE series (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
    UNIQUE (key, model, endpoint)
);

CREATE TABLE usage (
    minute INTEGER, series INTEGER, requests INTEGER, errors INTEGER,
    input INTEGER, output INTEGER, cached INTEGER, estimated INTEGER, busy_ms INTEGER,
    PRIMARY KEY (minute, series)
) WITHOUT ROWID;

-- The minute up to which there are rows of hours only.

CREATE TABLE added_up (until INTEGER);
INSERT INTO added_up VALUES (0);
