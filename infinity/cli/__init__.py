"""The command line: `infinity finetune | doctor | gc | bench`. The only part of the package that
prints."""
