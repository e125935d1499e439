"""`python -m pdserve.cli`: the same as the `pdserve` command, without needing it on the path."""

from pdserve.cli.main import main

main()
