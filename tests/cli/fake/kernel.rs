//! The fake's kernels.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ryokan::core::error::Error;
use ryokan::core::ids::Digest;
use ryokan::core::info::{CodeStatus, Job, JournalEntry, KernelInfo, MountInfo, ToolInfo, VarInfo};
use ryokan::core::rights::Rights;
use ryokan::core::value::Value;
use ryokan::rpc::convert::{exec, info, listing, to_capnp, value};
use ryokan::rpc::schema::ryokan_capnp as wire;

use super::execution::FakeExecution;
use super::{Connections, Log, past_event};

pub struct FakeKernel {
    pub info: KernelInfo,
    log: Log,
    connections: Connections,
    executions: RefCell<Vec<Rc<FakeExecution>>>,
    vars: RefCell<BTreeMap<String, Value>>,
    blob: Rc<RefCell<Vec<u8>>>,
}

impl FakeKernel {
    pub fn new(info: KernelInfo, log: Log, connections: Connections) -> Self {
        FakeKernel {
            info,
            log,
            connections,
            executions: RefCell::default(),
            vars: RefCell::default(),
            blob: Rc::default(),
        }
    }
}

impl wire::kernel::Server for FakeKernel {
    async fn run(self: Rc<Self>, p: wire::kernel::RunParams, mut r: wire::kernel::RunResults) -> capnp::Result<()> {
        let request = exec::read_exec_request(p.get()?.get_request()?).map_err(to_capnp)?;
        let number = self.executions.borrow().len() as u64 + 1;
        let execution = Rc::new(FakeExecution::new(number, request, self.log.clone(), self.connections.clone()));
        self.executions.borrow_mut().push(execution.clone());
        execution.start();
        r.get().set_exec_id(number);
        r.get().set_execution(capnp_rpc::new_client_from_rc(execution));
        Ok(())
    }

    async fn execution(
        self: Rc<Self>,
        p: wire::kernel::ExecutionParams,
        mut r: wire::kernel::ExecutionResults,
    ) -> capnp::Result<()> {
        let number = p.get()?.get_exec_id();
        let found = self.executions.borrow().get((number as usize).wrapping_sub(1)).cloned();
        let found = found.ok_or_else(|| to_capnp(Error::not_found(format!("there is no execution {number}"))))?;
        r.get().set_execution(capnp_rpc::new_client_from_rc(found));
        Ok(())
    }

    async fn interrupt(
        self: Rc<Self>,
        p: wire::kernel::InterruptParams,
        _: wire::kernel::InterruptResults,
    ) -> capnp::Result<()> {
        let number = p.get()?.get_exec_id();
        self.log.add(format!("interrupt {number}"));
        if let Some(execution) = self.executions.borrow().get((number as usize).wrapping_sub(1)) {
            execution.interrupt();
        }
        Ok(())
    }

    async fn info(self: Rc<Self>, _: wire::kernel::InfoParams, mut r: wire::kernel::InfoResults) -> capnp::Result<()> {
        info::write_kernel_info(r.get().init_info(), &self.info, Rights::ALL).map_err(to_capnp)
    }

    async fn get_var(
        self: Rc<Self>,
        p: wire::kernel::GetVarParams,
        mut r: wire::kernel::GetVarResults,
    ) -> capnp::Result<()> {
        let name = p.get()?.get_name()?.to_str()?;
        let vars = self.vars.borrow();
        let found = vars.get(name).ok_or_else(|| to_capnp(Error::not_found(format!("no variable {name}"))))?;
        value::write_value(r.get().init_value(), found).map_err(to_capnp)
    }

    async fn set_var(
        self: Rc<Self>,
        p: wire::kernel::SetVarParams,
        _: wire::kernel::SetVarResults,
    ) -> capnp::Result<()> {
        let p = p.get()?;
        let value = value::read_value(p.get_value()?).map_err(to_capnp)?;
        self.vars.borrow_mut().insert(p.get_name()?.to_str()?.into(), value);
        Ok(())
    }

    async fn describe_vars(
        self: Rc<Self>,
        _: wire::kernel::DescribeVarsParams,
        mut r: wire::kernel::DescribeVarsResults,
    ) -> capnp::Result<()> {
        let vars = self.vars.borrow();
        let var = |(name, value): (&String, &Value)| VarInfo {
            name: name.clone(),
            type_name: "any".into(),
            summary: value.to_plain_json().to_string(),
        };
        let vars: Vec<VarInfo> = vars.iter().map(var).collect();
        listing::write_vars(r.get().init_vars(vars.len() as u32), &vars);
        Ok(())
    }

    async fn mount(self: Rc<Self>, p: wire::kernel::MountParams, _: wire::kernel::MountResults) -> capnp::Result<()> {
        let p = p.get()?;
        let (path, source) = (p.get_path()?.to_str()?, p.get_source()?.to_str()?);
        self.log.add(format!("mount {path} {source} {}", p.get_writable()));
        Ok(())
    }

    async fn list_mounts(
        self: Rc<Self>,
        _: wire::kernel::ListMountsParams,
        mut r: wire::kernel::ListMountsResults,
    ) -> capnp::Result<()> {
        let mount = MountInfo { path: "/data".into(), source: "/srv/data".into(), writable: true };
        listing::write_mounts(r.get().init_mounts(1), &[mount]);
        Ok(())
    }

    async fn list_tools(
        self: Rc<Self>,
        _: wire::kernel::ListToolsParams,
        mut r: wire::kernel::ListToolsResults,
    ) -> capnp::Result<()> {
        let tool = ToolInfo {
            name: "wc".into(),
            description: "counts\nlines".into(),
            source: "builtin".into(),
            schema_json: "{\"type\":\"object\"}".into(),
        };
        listing::write_tools(r.get().init_tools(1), &[tool]);
        Ok(())
    }

    async fn check(
        self: Rc<Self>,
        p: wire::kernel::CheckParams,
        mut r: wire::kernel::CheckResults,
    ) -> capnp::Result<()> {
        let open = p.get()?.get_code()?.to_str()?.trim_end().ends_with('\\');
        let status = if open { CodeStatus::Incomplete } else { CodeStatus::Complete };
        r.get().set_status(exec::code_status_to_wire(status));
        Ok(())
    }

    async fn jobs(self: Rc<Self>, _: wire::kernel::JobsParams, mut r: wire::kernel::JobsResults) -> capnp::Result<()> {
        let job = Job { id: "1".into(), command: "sleep 9".into() };
        listing::write_jobs(r.get().init_jobs(1), &[job]);
        Ok(())
    }

    async fn processes(
        self: Rc<Self>,
        _: wire::kernel::ProcessesParams,
        _: wire::kernel::ProcessesResults,
    ) -> capnp::Result<()> {
        Ok(())
    }

    async fn start(self: Rc<Self>, _: wire::kernel::StartParams, _: wire::kernel::StartResults) -> capnp::Result<()> {
        self.log.add("start");
        Ok(())
    }

    async fn stop(self: Rc<Self>, p: wire::kernel::StopParams, _: wire::kernel::StopResults) -> capnp::Result<()> {
        self.log.add(format!("stop {}", p.get()?.get_force()));
        Ok(())
    }

    async fn message(
        self: Rc<Self>,
        p: wire::kernel::MessageParams,
        mut r: wire::kernel::MessageResults,
    ) -> capnp::Result<()> {
        let p = p.get()?;
        self.log.add(format!("message {} {}", p.get_role()?.to_str()?, p.get_text()?.to_str()?));
        r.get().set_sequence(9);
        Ok(())
    }

    async fn journal(
        self: Rc<Self>,
        p: wire::kernel::JournalParams,
        _: wire::kernel::JournalResults,
    ) -> capnp::Result<()> {
        let sink = p.get()?.get_sink()?;
        let since = p.get()?.get_since();
        let states: Vec<_> = self.executions.borrow().iter().map(|e| (e.code(), e.status_name())).collect();
        for (i, (code, status)) in states.into_iter().enumerate().filter(|(i, _)| *i as u64 + 1 > since) {
            let entry = JournalEntry {
                sequence: i as u64 + 1,
                at_ms: 1_700_000_000_000,
                kind: "execution".into(),
                actor: "test (uid 1000)".into(),
                exec: i as u64 + 1,
                text: code,
                status: status.into(),
                code: 0,
                err: String::new(),
                duration_us: 1500,
                output_bytes: 3,
                truncated_bytes: 0,
            };
            let mut call = sink.entry_request();
            info::write_journal_entry(call.get().init_entry(), &entry);
            call.send().await?;
        }
        Ok(())
    }

    async fn events(
        self: Rc<Self>,
        p: wire::kernel::EventsParams,
        mut r: wire::kernel::EventsResults,
    ) -> capnp::Result<()> {
        let since = p.get()?.get_since();
        r.get().set_subscription(send_events(p.get()?.get_sink()?, since, &self.log));
        Ok(())
    }

    async fn new_blob(
        self: Rc<Self>,
        _: wire::kernel::NewBlobParams,
        mut r: wire::kernel::NewBlobResults,
    ) -> capnp::Result<()> {
        self.blob.borrow_mut().clear();
        r.get().set_blob(capnp_rpc::new_client(FakeBlob(self.blob.clone())));
        Ok(())
    }

    async fn open_blob(
        self: Rc<Self>,
        _: wire::kernel::OpenBlobParams,
        mut r: wire::kernel::OpenBlobResults,
    ) -> capnp::Result<()> {
        r.get().set_blob(capnp_rpc::new_client(FakeBlob(self.blob.clone())));
        Ok(())
    }
}

struct FakeBlob(Rc<RefCell<Vec<u8>>>);

impl wire::blob_writer::Server for FakeBlob {
    async fn write(self: Rc<Self>, p: wire::blob_writer::WriteParams) -> capnp::Result<()> {
        self.0.borrow_mut().extend_from_slice(p.get()?.get_data()?);
        Ok(())
    }

    async fn finish(
        self: Rc<Self>,
        _: wire::blob_writer::FinishParams,
        mut r: wire::blob_writer::FinishResults,
    ) -> capnp::Result<()> {
        let blob = self.0.borrow();
        r.get().set_hash(Digest::from_bytes(*blake3::hash(&blob).as_bytes()).to_string());
        r.get().set_bytes(blob.len() as u64);
        Ok(())
    }
}

impl wire::blob_reader::Server for FakeBlob {
    async fn size(
        self: Rc<Self>,
        _: wire::blob_reader::SizeParams,
        mut r: wire::blob_reader::SizeResults,
    ) -> capnp::Result<()> {
        r.get().set_bytes(self.0.borrow().len() as u64);
        Ok(())
    }

    async fn read(
        self: Rc<Self>,
        p: wire::blob_reader::ReadParams,
        mut r: wire::blob_reader::ReadResults,
    ) -> capnp::Result<()> {
        let (from, most) = (p.get()?.get_from() as usize, p.get()?.get_max_bytes() as usize);
        let blob = self.0.borrow();
        let end = blob.len().min(from + most);
        r.get().set_data(&blob[from.min(end)..end]);
        r.get().set_end(end == blob.len());
        Ok(())
    }
}

struct FakeSubscription {
    task: tokio::task::JoinHandle<()>,
    log: Log,
}

impl wire::subscription::Server for FakeSubscription {}

impl Drop for FakeSubscription {
    fn drop(&mut self) {
        self.task.abort();
        self.log.add("unsubscribed");
    }
}

/// Three past events at once, the end of the past, then one every 50 ms.
pub fn send_events(sink: wire::event_sink::Client, since: u64, log: &Log) -> wire::subscription::Client {
    let task = tokio::task::spawn_local(async move {
        for sequence in since + 1.. {
            if sequence == 4 {
                let _ = sink.caught_up_request().send().promise.await;
            }
            if sequence > 3 {
                let pause = if sequence == 4 { Duration::from_millis(700) } else { Duration::from_millis(50) };
                tokio::time::sleep(pause).await;
            }
            let mut call = sink.event_request();
            info::write_event(call.get().init_event(), &past_event(sequence));
            if call.send().await.is_err() {
                return;
            }
        }
    });
    capnp_rpc::new_client(FakeSubscription { task, log: log.clone() })
}
