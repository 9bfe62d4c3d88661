"""The command line: `infinity finetune | inspect | export | doctor | gc | bench`. The only part of
the package that prints."""
