"""What the scripts print of each case: `ok` or `FAIL` with at most three problems. exit_code() belongs at the end."""

failed = []


def verdict(name, *problems):
    """problems: texts; empty ones are none."""
    problems = [str(problem) for problem in problems if problem]
    print(f"FAIL {name}: {'; '.join(problems[:3])}" if problems else f"ok   {name}", flush=True)
    if problems:
        failed.append(name)


def exit_code():
    return 1 if failed else 0
