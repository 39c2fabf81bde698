// A NameNode and some DataNodes in one process, on loopback, told what to do over a socket.
//
//   java -cp 'LIB/*' MiniHdfs.java DIRECTORY NAMENODE_PORT CONTROL_PORT DATANODES PARENT
//
// Prints "ready" when it serves. Each connection to the control port brings one line and gets one:
//   kill-datanode N | start-datanode N | kill-namenode | start-namenode | quit
// Ends when the process PARENT has ended (0: nobody's child).

import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.HashMap;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSCluster.DataNodeProperties;

public class MiniHdfs {
    static MiniDFSCluster cluster;
    static final Map<String, DataNodeProperties> stopped = new HashMap<>();
    static final Map<Integer, String> names = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        File directory = new File(arguments[0]);
        int dataNodes = Integer.parseInt(arguments[3]);
        long parent = Long.parseLong(arguments[4]);
        Configuration conf = new Configuration();
        conf.set("hdfs.minidfs.basedir", directory.getPath());
        conf.set("dfs.replication", "2");
        // A dead DataNode is noticed within seconds.
        conf.set("dfs.heartbeat.interval", "1");
        conf.set("dfs.namenode.heartbeat.recheck-interval", "1000");
        conf.set("dfs.namenode.stale.datanode.interval", "3000");
        conf.set("dfs.namenode.avoid.write.stale.datanode", "true");
        conf.set("dfs.namenode.avoid.read.stale.datanode", "true");
        // A pipeline goes on with what is left of it.
        conf.set("dfs.client.block.write.replace-datanode-on-failure.best-effort", "true");
        conf.set("dfs.permissions.enabled", "true");
        conf.set("dfs.namenode.safemode.extension", "0");
        conf.set("dfs.namenode.safemode.min.datanodes", "1");
        conf.set("dfs.namenode.acls.enabled", "false");
        cluster = new MiniDFSCluster.Builder(conf, directory)
            .nameNodePort(Integer.parseInt(arguments[1]))
            .numDataNodes(dataNodes)
            .build();
        cluster.waitActive();
        for (int number = 0; number < dataNodes; number++) {
            names.put(number, cluster.getDataNodes().get(number).getDisplayName());
        }
        // Its users make their directories below this one.
        org.apache.hadoop.fs.FileSystem files = cluster.getFileSystem();
        org.apache.hadoop.fs.Path volumes = new org.apache.hadoop.fs.Path("/volumes");
        files.mkdirs(volumes);
        files.setPermission(volumes, new org.apache.hadoop.fs.permission.FsPermission((short) 01777));
        InetAddress loopback = InetAddress.getLoopbackAddress();
        ServerSocket control = new ServerSocket(Integer.parseInt(arguments[2]), 10, loopback);
        control.setSoTimeout(1000);
        System.out.println("ready");
        while (true) {
            if (parent != 0 && !ProcessHandle.of(parent).map(ProcessHandle::isAlive).orElse(false)) {
                System.exit(0);
            }
            Socket socket;
            try {
                socket = control.accept();
            } catch (java.net.SocketTimeoutException none) {
                continue;
            }
            socket.setSoTimeout(5000);
            PrintStream answer = new PrintStream(socket.getOutputStream(), true);
            String line = new BufferedReader(new InputStreamReader(socket.getInputStream())).readLine();
            try {
                perform(line == null ? "" : line);
                answer.println("ok");
            } catch (Exception error) {
                answer.println("error: " + error);
            }
            socket.close();
        }
    }

    static void perform(String line) throws Exception {
        String[] words = line.trim().split(" ");
        switch (words[0]) {
            case "kill-datanode":
                String name = names.get(Integer.parseInt(words[1]));
                DataNodeProperties node = cluster.stopDataNode(name);
                if (node == null) {
                    throw new IllegalStateException(name + " does not run");
                }
                stopped.put(words[1], node);
                break;
            case "start-datanode":
                cluster.restartDataNode(stopped.remove(words[1]), true);
                cluster.waitActive();
                break;
            case "kill-namenode":
                cluster.shutdownNameNode(0);
                break;
            case "start-namenode":
                cluster.restartNameNode(0, true);
                break;
            case "quit":
                // Nothing that it holds is needed again.
                Runtime.getRuntime().halt(0);
                break;
            default:
                throw new IllegalArgumentException("unknown command: " + line);
        }
    }
}
