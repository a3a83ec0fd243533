"""Files and tables of a stream's output: records, state, the tables that follow the ledger."""
