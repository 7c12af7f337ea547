from comm_orchestrator.tools.cli import main

main()
