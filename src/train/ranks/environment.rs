//! What a launcher tells its processes, in their environment.
//!
//! | launcher | rank, ranks, place on the machine | where to meet |
//! |---|---|---|
//! | torchrun, `embertune launch` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `…_SIZE`, `…_LOCAL_RANK` | the same; this machine if all ranks are on it |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` | the same; the first of `SLURM_STEP_NODELIST` |
//!
//! The first that is there counts. Under Slurm only tasks of `srun` are ranks: the batch script itself is none.

use crate::{Error, Result};

/// Where processes meet when nobody says it.
const PORT: u16 = 29_500;

/// What started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, or `embertune launch`.
    Torchrun,
    /// mpirun.
    OpenMpi,
    /// srun.
    Slurm,
}

/// This process among those of a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Which rank it is, from 0.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Which one it is on its machine: the index of its device.
    pub local_rank: usize,
    /// Host and port of rank 0.
    pub master: (String, u16),
    /// Who started it.
    pub launcher: Launcher,
}

/// The names of one launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
}

const LAUNCHERS: [Names; 3] = [
    Names { launcher: Launcher::Torchrun, rank: "RANK", ranks: "WORLD_SIZE", local_rank: "LOCAL_RANK" },
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        ranks: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
    },
];

impl Place {
    /// Reads the variables; `None` where no launcher has set any.
    ///
    /// # Errors
    /// A variable that is missing beside the others, or isn't what it should be.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let Some(names) =
            LAUNCHERS.iter().find(|n| variable(n.ranks).is_some() && variable(n.rank).is_some())
        else {
            return Ok(None);
        };
        let number = |name: &str, limit: usize| -> Result<usize> {
            let text = variable(name).ok_or_else(|| wrong(name, "is not set".into()))?;
            let number = text.trim().parse().ok().filter(|n| *n < limit);
            number.ok_or_else(|| wrong(name, format!("is `{text}`, wanted a number below {limit}")))
        };
        let ranks = number(names.ranks, 1 << 20)?;
        if ranks <= 1 {
            return Ok(None);
        }
        let rank = number(names.rank, ranks)?;
        let local_rank = number(names.local_rank, ranks)?;
        let master = (host(names, ranks, &variable)?, port(names.launcher, &variable)?);
        Ok(Some(Self { rank, ranks, local_rank, master, launcher: names.launcher }))
    }
}

fn host(names: &Names, ranks: usize, variable: &impl Fn(&str) -> Option<String>) -> Result<String> {
    if let Some(host) = variable("MASTER_ADDR") {
        return Ok(host);
    }
    let found = match names.launcher {
        Launcher::Torchrun => None,
        Launcher::OpenMpi => {
            let here = variable("OMPI_COMM_WORLD_LOCAL_SIZE").and_then(|n| n.parse().ok());
            (here == Some(ranks)).then(|| "127.0.0.1".to_string())
        }
        Launcher::Slurm => variable("SLURM_STEP_NODELIST").and_then(|list| first_node(&list)),
    };
    found.ok_or_else(|| wrong("MASTER_ADDR", "is not set, so the ranks don't know where to meet".into()))
}

fn port(launcher: Launcher, variable: &impl Fn(&str) -> Option<String>) -> Result<u16> {
    if let Some(text) = variable("MASTER_PORT") {
        let port = text.trim().parse().ok().filter(|&port| port > 0 && port < u16::MAX);
        let port: u16 = port.ok_or_else(|| wrong("MASTER_PORT", format!("is `{text}`, wanted a port")))?;
        // torchrun's own agent may sit on the port that it names.
        let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text == "True");
        return Ok(if taken { port + 1 } else { port });
    }
    let job = variable("SLURM_JOB_ID").filter(|_| launcher == Launcher::Slurm);
    // Jobs that share a machine meet at ports of their own.
    Ok(job.and_then(|id| id.parse::<u64>().ok()).map_or(PORT, |id| 20_000 + (id % 20_000) as u16))
}

fn wrong(name: &str, what: String) -> Error {
    Error::Usage {
        message: format!("the environment says that there are several ranks, but `{name}` {what}"),
        hint:
            "start the ranks with `embertune launch`, torchrun, srun or mpirun; or unset RANK and WORLD_SIZE \
               to train alone"
                .into(),
    }
}

/// The first host of Slurm's list: `node[07-09,12],other` is `node07`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else {
        return (!prefix.is_empty()).then(|| prefix.to_string());
    };
    let number: String = inside.chars().take_while(char::is_ascii_digit).collect();
    let suffix: String = inside.split_once(']')?.1.chars().take_while(|&c| c != ',').collect();
    Some(format!("{prefix}{number}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<Place>> {
        let pairs: Vec<(&str, &str)> = text.split_whitespace().filter_map(|p| p.split_once('=')).collect();
        Place::read(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    fn place(text: &str) -> (usize, usize, usize, String, u16, Launcher) {
        let Place { rank, ranks, local_rank, master, launcher } = read(text).unwrap().unwrap();
        (rank, ranks, local_rank, master.0, master.1, launcher)
    }

    #[test]
    fn launchers_are_told_apart() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=n0 MASTER_PORT=1234";
        assert_eq!(place(torchrun), (3, 4, 1, "n0".into(), 1234, Launcher::Torchrun));
        let agent = format!("{torchrun} TORCHELASTIC_USE_AGENT_STORE=True");
        assert_eq!(place(&agent).4, 1235);
        let mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1";
        let here = format!("{mpi} OMPI_COMM_WORLD_LOCAL_SIZE=2");
        assert_eq!(place(&here), (1, 2, 1, "127.0.0.1".into(), PORT, Launcher::OpenMpi));
        assert!(read(mpi).unwrap_err().to_string().contains("MASTER_ADDR"));
        let slurm = "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_JOB_ID=40007";
        let slurm = format!("{slurm} SLURM_STEP_NODELIST=gpu[07-08,12]");
        assert_eq!(place(&slurm), (9, 16, 1, "gpu07".into(), 20_007, Launcher::Slurm));
    }

    #[test]
    fn one_rank_or_none_is_no_group() {
        for text in ["", "RANK=0", "RANK=0 WORLD_SIZE=1", "SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_LOCALID=0"] {
            assert_eq!(read(text).unwrap(), None, "{text}");
        }
    }

    #[test]
    fn contradictions_are_errors_that_name_the_variable() {
        let base = "WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=x";
        for (more, name) in
            [("RANK=2", "`RANK`"), ("RANK=-1", "`RANK`"), ("RANK=1 MASTER_PORT=0", "`MASTER_PORT`")]
        {
            let error = read(&format!("{base} {more}")).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let error = read("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x").unwrap_err();
        assert!(error.to_string().contains("`LOCAL_RANK` is not set"), "{error}");
    }

    #[test]
    fn the_first_node_of_a_list() {
        let cases =
            [("a1", "a1"), ("a1,b2", "a1"), ("a[3-5]", "a3"), ("a[03,7]-ib,c", "a03-ib"), ("a-b[1]", "a-b1")];
        for (list, first) in cases {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_node(""), None);
    }
}
