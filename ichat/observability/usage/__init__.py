"""The ledger: requests and tokens by minute, key, model and endpoint, in memory first and on disk soon after."""
