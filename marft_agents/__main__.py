from marft_agents.cli import main

if __name__ == "__main__":
    main()
