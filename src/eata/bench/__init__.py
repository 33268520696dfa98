"""The paper's experiments: protocol -> cells -> store -> tables, plots and report."""
