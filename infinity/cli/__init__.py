"""The command line: `infinity finetune | doctor | gc`. The only part of the package that prints."""
