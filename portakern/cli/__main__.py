from portakern.cli import main

main()
