"""The sandbox in which a candidate program runs. Standard library only: this folder is what the sandbox itself imports.

    outside                      sandbox 1 (test side)                     sandbox 2 (candidate side)
    trainer --job(code, tests)--> keeper --fork--> tests ==calls, data==> candidate <--fork-- keeper
            <-----verdict-------- keeper <-verdict-- tests

Two keepers per worker, each in a sandbox of its own (bubblewrap, or `enter` where that is missing): no network, a read-only
system, nothing of the user's files. The candidate runs in a fork of the candidate side, in further namespaces of its own
(`jail`): own process tree, empty private scratch, no capabilities, a seccomp filter, rlimits. The tests run in a fork of
the test side and reach the candidate's functions by remote call: plain data goes in, plain data comes out (`codec`). So
the candidate's process never holds a test, an expected value or the verdict's channel, and what it prints, patches, raises
or exits with can only make its own answers wrong. The candidate side's keeper never reads code or tests, so no fork of it
holds another candidate's. Everything that parses the candidate's text runs inside its jail.

Left out: counting CPU over several processes (each has its own limit), and cgroups: by default a candidate may not fork, so
its address-space limit is the memory limit; where forks are allowed the memory is divided among them.
"""
