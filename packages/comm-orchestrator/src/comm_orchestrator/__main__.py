from comm_orchestrator.cli import main

main()
