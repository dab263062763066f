/** States of a task, with the contract's names. */
enum State { starting, waiting, acting, pausing, paused, done, ending, ended }
