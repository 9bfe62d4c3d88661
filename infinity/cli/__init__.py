"""The command line `infinity`. `main` lists its commands. No other part of the package prints."""
